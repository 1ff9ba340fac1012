"""An echo worker that says more than any gateway passes on: of 128 requests 32,000 a second."""

from tests.support.echo_worker import EchoWorker

from antiphon.service.main import run
from antiphon.wire.base import Role

STEP_S = 0.004

if __name__ == "__main__":
    run(Role.WORKER, lambda settings: EchoWorker(settings, step_s=STEP_S))
