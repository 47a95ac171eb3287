"""`roll-train algorithms`: every preset with a line and a source, in a terminal of 80 columns."""

import pytest
import yaml

from trainer.algorithms.correction_presets import CORRECTIONS
from trainer.algorithms.presets import FORMER_NAMES, PAPERS, PRESETS
from trainer.algorithms.settings import AlgorithmSettings
from trainer.cli import main


def test_all_are_listed_within_eighty_columns(capsys):
    assert main(["algorithms"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    listed = [line.split()[0] for line in lines if line and not line.startswith(" ")]
    assert set(PRESETS) | set(CORRECTIONS) <= set(listed)
    text = "\n".join(lines)
    assert all(paper.source in text for paper in PAPERS.values())


@pytest.mark.parametrize("name", PRESETS)
def test_one_is_shown_as_settings_that_read_back(name, capsys):
    assert main(["algorithms", name]) == 0
    text = capsys.readouterr().out
    assert AlgorithmSettings.model_validate(yaml.safe_load(text)["algorithm"]) == PRESETS[name]
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert PAPERS[name].source in "\n".join(comments)
    assert max(map(len, text.splitlines())) <= 80


def test_corrections_and_former_names_are_shown_too(capsys):
    assert main(["algorithms", "icepop"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)["algorithm"]["correction"]
    assert (shown["kind"], shown["low"], shown["high"]) == ("band", 0.5, 5.0)
    for former, name in FORMER_NAMES.items():
        assert main(["algorithms", former]) == 0
        assert capsys.readouterr().out.startswith(f"# {name}:")


def test_a_name_that_is_none_is_refused_with_a_hint(capsys):
    assert main(["algorithms", "grppo"]) == 2
    assert "did you mean 'grpo'" in capsys.readouterr().err
