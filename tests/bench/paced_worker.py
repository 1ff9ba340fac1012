"""An echo worker with the pace of a model: `STEP_S` in its environment is the time of a step."""

import os

from tests.support.echo_worker import EchoWorker

from antiphon.service.main import run

if __name__ == "__main__":
    run(EchoWorker(step_s=float(os.environ["STEP_S"])))  # noqa: TID251 no service reads it
