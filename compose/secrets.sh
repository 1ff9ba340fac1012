#!/bin/sh
# Make .env of .env.example, with a random password at each empty one. Leaves an .env that is there.
set -eu
cd "$(dirname "$0")"
if [ -e .env ]; then exit 0; fi
umask 077
while IFS= read -r line; do
  case $line in
    # nats-server takes the value as text only if it begins with a letter.
    *_PASSWORD=) echo "${line}p$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')" ;;
    *) echo "$line" ;;
  esac
done < .env.example > .env.new
mv .env.new .env
