"""An echo worker that sends more than any gateway forwards: 32,000 tokens/s to 128 requests."""

from tests.support.echo_worker import EchoWorker

from antiphon.service.main import run

STEP_S = 0.004

if __name__ == "__main__":
    run(EchoWorker(step_s=STEP_S))
