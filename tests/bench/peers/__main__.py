"""`make bench-peers`: Antiphon and other servers on the same weights and prompts, in turn.

python -m tests.bench.peers --rounds 5
python -m tests.bench.peers --install-only --peers vllm llama.cpp
python -m tests.bench.peers --page-only          write docs/benchmarks.md from the results

Results are stored by instruction set, since they depend on it.
"""

from __future__ import annotations

import argparse
import os
import sys
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from tests.bench.machine import instructions
from tests.bench.models import CACHE, Model, made
from tests.bench.page.write import PAGE, write_page
from tests.bench.peers.cases import CASES
from tests.bench.peers.peer import NotHere, Peer
from tests.bench.peers.quiet import Busy
from tests.bench.peers.rounds import Referee, entrant, print_progress, reports, summarize
from tests.bench.peers.servers import Antiphon, LlamaCpp, OpenVino, TransformersServe, Vllm
from tests.bench.summary import RESULTS, Entrant, write_results

if TYPE_CHECKING:
    from collections.abc import Sequence


KINDS: dict[str, type[Peer]] = {
    kind.name: kind for kind in (Antiphon, LlamaCpp, Vllm, OpenVino, TransformersServe)
}


def main() -> None:
    arguments = _arguments()
    if arguments.page_only:
        write_page()
        return
    cores = os.cpu_count() or 1
    cases = [case for case in CASES if case.name in arguments.cases]
    shapes = dict.fromkeys(case.shape for case in cases)
    models = [made(shape, arguments.cache) for shape in shapes]
    kinds = [KINDS[name](arguments.cache, cores) for name in arguments.peers]
    peers, entrants = _install(kinds, models[0])
    if arguments.install_only:
        _prepare(peers, models)
        return
    if arguments.rehearse:
        arguments.rounds, arguments.quiet_in_s = 1, None
    asked = [(model, [c for c in cases if c.shape is model.shape]) for model in models]
    referee = Referee(arguments.quiet_in_s)
    try:
        # Results are on disk after each turn.
        for raw in reports(peers, entrants, asked, arguments.rounds, referee):
            if not arguments.rehearse:
                write_results(arguments.json, raw, summarize(raw))
    except Busy as error:
        sys.exit(f"not measured: {error}")
    if arguments.json.parent == RESULTS and not arguments.rehearse:
        write_page()


def _install(peers: Sequence[Peer], first: Model) -> tuple[list[Peer], list[Entrant]]:
    """Return the available peers, and a description of each serving the first model."""
    here: list[Peer] = []
    entrants: list[Entrant] = []
    for peer in peers:
        print_progress(f"installing {peer.name}")
        try:
            peer.install()
            entrants.append(entrant(peer, first))
            here.append(peer)
        except NotHere as error:
            print_progress(f"  skipped: {error}")
            entrants.append(Entrant(name=peer.name, arithmetic=peer.arithmetic, skipped=str(error)))
    return here, entrants


def _prepare(peers: Sequence[Peer], models: Sequence[Model]) -> None:
    for peer, model in product(peers, models):
        print_progress(f"converting {model.name} for {peer.name}")
        try:
            peer.convert(model)
        except NotHere as error:
            print_progress(f"  not possible: {error}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-peers")
    names = [case.name for case in CASES]
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of peers and models")
    parser.add_argument("--json", type=Path, default=RESULTS / f"peers-{instructions()}.json")
    parser.add_argument(
        "--quiet-in-s",
        type=float,
        default=60.0,
        help="maximum time to wait for an idle machine before each case",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="one round without waiting for an idle machine; writes no results",
    )
    parser.add_argument("--install-only", action="store_true")
    parser.add_argument("--page-only", action="store_true", help=f"only write {PAGE.name}")
    return parser.parse_args()


if __name__ == "__main__":
    main()
