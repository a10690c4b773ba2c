"""Environment variables that hold for a while."""

from __future__ import annotations

import os

import pytest

from tests.support.environment import environment


def test_what_was_set_in_a_block_is_gone_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMIG_TEST_KEPT", "before")
    with environment({"KVMIG_TEST_KEPT": "inside", "KVMIG_TEST_NEW": "1"}):
        os.environ["KVMIG_TEST_LATER"] = "1"
        assert os.environ["KVMIG_TEST_KEPT"] == "inside"
    assert os.environ["KVMIG_TEST_KEPT"] == "before"
    assert not {"KVMIG_TEST_NEW", "KVMIG_TEST_LATER"} & os.environ.keys()
