"""Reading scheduled HLO of both spellings, on snippets after what jax 0.10 and 0.12 print."""

from __future__ import annotations

import pathlib

import pytest

from optimus_jax.gpu.tally import Tally, is_filled, tally
from optimus_jax.gpu.windows import collectives, within

HLO = pathlib.Path(__file__).parent / "hlo"
# A pair with work inside, a synchronous pair, and a loop inside a pair.
OLD = (HLO / "jax_0_10.txt").read_text()
# A plain one is synchronous, one is wrapped in a fusion, and so is a slice.
NEW = (HLO / "jax_0_12.txt").read_text()


def test_the_older_spelling() -> None:
    gather, reduce, scatter, permute = collectives(OLD)

    assert (gather.kind, gather.is_sync, gather.where) == ("all-gather", False, ())
    (loop,) = gather.inside  # with what its body multiplies
    assert (loop.opcode, loop.products) == ("while", ("jit(step)/encoder/while/body/dot_general",))

    assert (reduce.kind, reduce.is_sync, reduce.operands) == ("all-reduce", False, 1)
    assert (reduce.where, reduce.computation) == (("while.2",), "body")
    assert [k.name for k in reduce.inside] == ["gemm_fusion", "loop_fusion"]
    assert reduce.inside[0].products == ("jit(step)/llm_forward/jvp(encoder)/dot_general",)
    assert reduce.inside[1].products == ()

    assert (scatter.kind, scatter.is_sync, scatter.inside) == ("reduce-scatter", True, ())
    assert scatter.operands == 2  # combined
    assert (permute.kind, permute.is_sync, permute.inside) == ("collective-permute", False, ())


def test_the_newer_spelling() -> None:
    wrapped, plain = collectives(NEW)
    assert (wrapped.kind, wrapped.is_sync) == ("all-reduce", False)
    assert wrapped.op_name == "jit(step)/llm_backward/paired/psum"
    assert [k.name for k in wrapped.inside] == ["inner"]
    assert is_filled(wrapped)
    assert (plain.kind, plain.is_sync, plain.inside) == ("all-reduce", True, ())


def test_counts_by_direction() -> None:
    zero = {"forward": 0, "backward": 0, "gather": 0, "scatter": 0}
    found = tally(collectives(OLD))
    assert found.collectives == {"forward": 1, "backward": 1, "gather": 1, "scatter": 0}
    assert found.planned == found.collectives
    assert found.filled == {"forward": 1, "backward": 0, "gather": 1, "scatter": 0}
    assert tally(collectives(NEW)) == Tally(
        {**zero, "backward": 2}, {**zero, "backward": 2}, {**zero, "backward": 1}
    )


def test_a_place_that_runs_several_times_counts_as_often() -> None:
    found = tally(collectives(OLD), lambda c: 4 if c.where else 1)
    assert found.collectives == {"forward": 4, "backward": 4, "gather": 1, "scatter": 0}
    assert found.filled == {"forward": 4, "backward": 0, "gather": 1, "scatter": 0}


def test_the_encoders_own_collectives_are_not_the_llms() -> None:
    changed = OLD.replace("llm_forward/while/body/paired/psum", "llm_forward/encoder/psum")
    assert tally(collectives(changed)).collectives["forward"] == 0


def test_work_of_the_llm_fills_no_window() -> None:
    changed = OLD.replace("jvp(encoder)", "jvp(llm)")
    assert tally(collectives(changed)).filled["forward"] == 0


def test_scopes_are_whole_names() -> None:
    assert within("jit(step)/transpose(jvp(encoder))/dot", "encoder")
    assert within("encoder/dot", "encoder")
    assert not within("jit(step)/encoder_first/dot", "encoder")
    assert not within("state.params['encoder']", "encoder")


def test_what_is_not_scheduled_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks is_scheduled"):
        collectives(OLD.replace(", is_scheduled=true", ""))
