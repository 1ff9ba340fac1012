"""An echo worker with a step of 20 ms: 6,400 tokens/s to 128 requests."""

from tests.support.echo_worker import EchoWorker

from antiphon.service.main import run

STEP_S = 0.02

if __name__ == "__main__":
    run(EchoWorker(step_s=STEP_S))
