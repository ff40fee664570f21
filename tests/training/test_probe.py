"""The probe: a reply is right when all its tokens are, and nothing else counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from halocline.training.build_probes import main, make_probe
from halocline.training.data import Encoder
from halocline.training.probe import exact_share, load_probes
from halocline.training.render import render_item
from halocline.training.suites import make_exercise

GROUPS = ["sums", "copying", "facts", "chat", "tools", "lookup-200"]


@pytest.mark.parametrize("group", GROUPS)
def test_the_marked_targets_are_the_right_output(encoder: Encoder, group: str) -> None:
    probe = make_probe(encoder, group, count=8, seed=11)
    assert probe.tokens_BT.shape[1] % 128 == 0
    assert np.array_equal(probe.tokens_BT[:, 1:], probe.targets_BT[:, :-1])
    for index in range(8):
        marked = probe.targets_BT[index][probe.is_reply_BT[index]].tolist()
        target = render_item(make_exercise(group, index, seed=11)).target
        assert encoder.tokenizer.decode(marked, skip_special_tokens=False) == target


def test_one_wrong_reply_token_spoils_one_exercise(encoder: Encoder) -> None:
    probe = make_probe(encoder, "sums", count=4, seed=11)
    predicted = np.where(probe.is_reply_BT, probe.targets_BT, 77)
    assert exact_share(probe, predicted) == 1.0
    last = np.flatnonzero(probe.is_reply_BT[2])[-1]
    predicted[2, last] += 1
    assert exact_share(probe, predicted) == 0.75


def test_probes_come_back_from_a_file(tmp_path: Path, encoder: Encoder, graded: Path) -> None:
    out = tmp_path / "probes.npz"
    main(["--out", str(out), "--tokenizer", str(graded), "--count", "3", "--seed", "11", "--groups", "tools", "sums"])
    probes = load_probes(out)
    assert [probe.group for probe in probes] == ["tools", "sums"]
    for probe in probes:
        made = make_probe(encoder, probe.group, count=3, seed=11)
        assert all(np.array_equal(one, other) for one, other in zip(probe[1:], made[1:], strict=True))


def test_the_seed_of_the_released_suites_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path / "probes.npz"), "--seed", "5"])
