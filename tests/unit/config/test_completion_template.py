"""A completion template is a name that is known, or a file."""

from __future__ import annotations

import pytest

from antiphon.config.model import TEMPLATES, ModelConfig


@pytest.mark.parametrize("said", ["", "form.json", *(template.name for template in TEMPLATES)])
def test_a_name_or_a_file_is_taken(said: str) -> None:
    assert ModelConfig(completion_template=said).completion_template == said


def test_another_name_is_refused_with_the_list() -> None:
    names = ", ".join(template.name for template in TEMPLATES)
    with pytest.raises(ValueError, match=f"'codellama': must be {names}"):
        ModelConfig(completion_template="codellama")
