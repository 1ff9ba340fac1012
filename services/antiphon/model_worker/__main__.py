"""`python -m antiphon.model_worker`.

On a machine other than the first of a worker it runs ranks that only compute.
"""

from __future__ import annotations

import sys

from antiphon.config.errors import ConfigError
from antiphon.config.load import load_process
from antiphon.model_worker.service import ModelWorker
from antiphon.service.main import BAD_SETTINGS, run

if __name__ == "__main__":
    try:
        arguments = load_process()
        arguments.settings.parallel.check()
    except ConfigError as error:
        sys.stderr.write(f"antiphon worker: {error}\n")
        sys.exit(BAD_SETTINGS)
    if (parallel := arguments.settings.parallel).node_rank:
        from antiphon.model_worker.ranks.follower import follow_node

        sys.exit(follow_node(parallel, arguments.instance))
    run(ModelWorker)
