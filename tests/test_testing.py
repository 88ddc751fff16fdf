"""What `torch_offload.testing` hands to other suites must notice what goes wrong."""

from __future__ import annotations

import collections
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torch_offload import Offloader, mirror, storage, testing
from torch_offload.testing import assert_round_trip


def test_many_specimens_have_ties_slices_and_foreign_aliases() -> None:
    seen: collections.Counter[str] = collections.Counter()

    @settings(derandomize=True, database=None, max_examples=200)
    @given(specimen=testing.specimens())
    def look(specimen: testing.Specimen) -> None:
        seen.update({"every", *specimen.kinds})

    look()
    assert all(seen[kind] >= seen["every"] / 10 for kind in ("tie", "slice", "alias")), seen


@given(data=st.data())
def test_the_round_trip_holds_for_every_specimen(device: str, data: st.DataObject) -> None:
    specimen = data.draw(testing.specimens(device))
    assert_round_trip(specimen.module, extra=specimen.aliases, device=device)


def test_the_round_trip_sees_a_changed_byte() -> None:
    with (
        testing.link(corrupt=lambda index, held: held[:1].add_(1) if index == 3 else None),
        pytest.raises(AssertionError, match=r"bytes of .* changed"),
    ):
        assert_round_trip(nn.Linear(3, 3), device="cpu", verify=False)


def test_the_round_trip_sees_memory_that_is_not_freed() -> None:
    with (
        mock.patch.object(storage, "give_up", return_value=None),
        pytest.raises(AssertionError, match=r"\['Linear\.weight'\] kept 36 bytes, not 0"),
    ):
        assert_round_trip(nn.Linear(3, 3), device="cpu")


def test_the_round_trip_sees_a_tensor_that_was_replaced() -> None:
    model = nn.Linear(3, 3)
    reload = Offloader.reload

    def replacing(off: Offloader, *args: object) -> object:
        report = reload(off, *args)
        model.bias.data = model.bias.data.clone()
        return report

    with mock.patch.object(Offloader, "reload", replacing), pytest.raises(AssertionError, match=r"\(3,\).* is not .*\(3,\)"):
        assert_round_trip(model, device="cpu")


def test_the_round_trip_sees_more_host_memory_than_bytes() -> None:
    extent = mirror._extent
    with (
        mock.patch.object(mirror, "_extent", lambda layout: 2 * extent(layout)),
        pytest.raises(AssertionError, match="host bytes for"),
    ):
        assert_round_trip(nn.Linear(100, 100), device="cpu")


def test_the_round_trip_sees_a_report_that_is_wrong() -> None:
    offload = Offloader.offload

    def boasting(off: Offloader, *args: object) -> object:
        report = offload(off, *args)
        object.__setattr__(report, "nbytes", report.nbytes + 1)
        return report

    with mock.patch.object(Offloader, "offload", boasting), pytest.raises(AssertionError, match="says 49 bytes, 48 moved"):
        assert_round_trip(nn.Linear(3, 3), device="cpu")
