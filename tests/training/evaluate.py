"""Scores the embedded model: `python -m tests.training.evaluate`.

Prints the share of exact answers, skill by skill, to prompts that no training run has seen to the
letter. Where a skill has values to draw, such as numbers or names, these are held out. Where it has
fixed questions alone, a prompt differs from trained ones by an opening or by letter case only, so
the score shows that they are known, not that anything is generalized. Exits with 1 if a skill is
below its floor.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
from tests.training.dialogue import Skill, seeded
from tests.training.generation import Generate, HttpModel, LocalModel, ServedModel
from tests.training.grammar import SKILLS, Case, case

from antiphon import embedded

if TYPE_CHECKING:
    from collections.abc import Sequence

PROMPTS_PER_SKILL = 500
ANSWER_TOKENS_MAX = 400  # the longest count, a hundred numbers of three digits, fits


class Miss(msgspec.Struct, frozen=True):
    question: str
    expected: str
    answered: str


class Score(msgspec.Struct, frozen=True):
    skill: str
    prompts: int
    exact: int
    floor: float | None
    misses: tuple[Miss, ...]

    @property
    def share(self) -> float:
        return self.exact / self.prompts

    @property
    def reached(self) -> bool:
        return self.floor is None or self.share >= self.floor


def held_out_cases(skill: Skill, seed: int, count: int = PROMPTS_PER_SKILL) -> list[Case]:
    """Generate the prompts of one skill, determined by the seed."""
    rng = seeded(f"evaluate {skill.name}", seed)
    return [case(rng, skill) for _ in range(count)]


def score(skill: Skill, cases: Sequence[Case], generate: Generate) -> Score:
    """Answer the prompts and compare exactly."""
    # A token is at least one byte, so a correct answer and its end fit; wrong ones are cut.
    tokens_max = max(len(one.answer.encode()) for one in cases) + 1
    answers = generate([one.chat for one in cases], min(tokens_max, ANSWER_TOKENS_MAX))
    misses = tuple(
        Miss(one.chat.messages[-1].content, one.answer, answer)
        for one, answer in zip(cases, answers, strict=True)
        if one.answer != answer.strip()
    )
    return Score(skill.name, len(cases), len(cases) - len(misses), skill.floor, misses)


def line(one: Score) -> str:
    floor = "" if one.floor is None else f"{one.floor:.0%}"
    return f"{one.skill:<14}{one.prompts:>8}{one.exact:>8}{one.share:>9.1%}{floor:>8}"


def main() -> int:
    """Score a model folder with transformers, or the model of a running stack."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", type=Path, default=embedded.path())
    parser.add_argument("--nats-url", help="score the stack that is served there instead")
    parser.add_argument("--url", help="score it over HTTP instead, as its gateway parses answers")
    parser.add_argument("--served-model", default=embedded.SERVED_NAME, help="its name there")
    parser.add_argument("--prompts", type=int, default=PROMPTS_PER_SKILL, help="a skill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the scores and all misses here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    started_s = time.monotonic()
    generate: Generate
    if arguments.url:
        generate = HttpModel(arguments.url, arguments.served_model)
    elif arguments.nats_url:
        generate = ServedModel(arguments.nats_url, arguments.served_model)
    else:
        generate = LocalModel(arguments.model_path)
    scores: list[Score] = []
    print(f"{'skill':<14}{'prompts':>8}{'exact':>8}{'share':>9}{'floor':>8}")
    for skill in SKILLS:
        cases = held_out_cases(skill, arguments.seed, arguments.prompts)
        scores.append(score(skill, cases, generate))
        print(line(scores[-1]), flush=True)
    print(f"{time.monotonic() - started_s:.0f} s")
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(scores), indent=2))
    return 0 if all(one.reached for one in scores) else 1


if __name__ == "__main__":
    sys.exit(main())
