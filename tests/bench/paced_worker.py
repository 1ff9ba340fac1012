"""An echo worker with the pace of a model: 600 tokens a second when 16 requests run."""

from tests.support.echo_worker import EchoWorker

from antiphon.service.main import run

RUNNING = 16
TOKENS_PER_S = 600

if __name__ == "__main__":
    run(EchoWorker(step_s=RUNNING / TOKENS_PER_S))
