"""A rank of a worker that is not its first: `python -m antiphon.model_worker.ranks`.

It is started by the worker on the same machine, and learns all it has to load from rank 0.
"""

from __future__ import annotations

import argparse
import sys

from antiphon.model_worker.ranks.follower import follow
from antiphon.model_worker.ranks.layout import RankLayout

if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m antiphon.model_worker.ranks", description=__doc__)
    parser.add_argument("--address", required=True, help="host:port of rank 0")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--tp-size", type=int, required=True)
    parser.add_argument("--pp-size", type=int, required=True)
    parser.add_argument("--attn-dp-size", type=int, required=True)
    parser.add_argument("--instance", required=True, help="name in the log")
    parser.add_argument("--parent-pid", type=int, required=True, help="ends with that process")
    arguments = parser.parse_args()
    host, _, port = arguments.address.rpartition(":")
    sys.exit(
        follow(
            (host, int(port)),
            rank=arguments.rank,
            ranks=RankLayout(arguments.tp_size, arguments.pp_size, arguments.attn_dp_size),
            instance=arguments.instance,
            parent_pid=arguments.parent_pid,
        )
    )
