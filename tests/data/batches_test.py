from __future__ import annotations

import pickle
import threading

import numpy as np
import pytest

from optimus_jax.data import digits, tokens
from optimus_jax.data.batches import Batches, Prefetch, examples
from optimus_jax.data.digits import Digits

WAIT = 10  # seconds, for what should take milliseconds


def dataset(split="heldout", seed=0, count=(1, 4), **changes):
    shape = {"canvas": (12, 40), "image_tokens": 6, "length": 16}
    return examples(Digits(*count), split, seed, **{**shape, **changes})


def same(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[n], right[n]) for n in left)


def test_an_example_is_a_picture_with_the_sequence_of_its_caption():
    for index in range(50):
        example = dataset()[index]
        assert set(example) == {"image", "tokens", "targets", "weights", "caption"}
        assert example["image"].shape == (12, 40, 1) and example["image"].dtype == np.uint8
        assert same(
            {name: example[name] for name in ("tokens", "targets", "weights")},
            tokens.sequence(example["caption"], 6, 16),
        )
        assert tokens.decode(example["tokens"]) == example["caption"]


@pytest.mark.parametrize("split", digits.SPLITS)
def test_pictures_are_made_of_the_digits_of_their_split(split):
    pool, sight = digits.load(split), {}
    for image, label in zip(pool.images, pool.labels, strict=True):
        sight[image.tobytes()] = str(label)
    for index in range(50):
        example = dataset(split, canvas=(8, 16), count=(2, 2))[index]
        halves = [example["image"][:, x : x + 8, 0].copy().tobytes() for x in (0, 8)]
        assert " ".join(sight[half] for half in halves) == example["caption"]


def test_an_example_depends_on_seed_and_index_alone():
    expected = [dataset()[index] for index in range(8)]
    shared = dataset()
    for index in (5, 0, 7, 5, 2):
        assert same(shared[index], expected[index])
    assert same(dataset()[2:6][1], expected[3])
    assert same(pickle.loads(pickle.dumps(dataset()))[4], expected[4])


def test_seeds_and_indices_give_different_examples():
    images = {
        dataset(seed=seed)[index]["image"].tobytes() for seed in range(8) for index in range(8)
    }
    assert len(images) == 64


def test_the_dataset_does_not_repeat():
    assert not same(dataset()[0], dataset()[10**15])
    assert same(dataset()[10**15], dataset()[10**15])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": "test"}, r"'test' does not exist.*train, heldout"),
        ({"seed": -1}, r"seed is -1.*at least 0"),
        ({"canvas": (12, 31)}, r"4 digits.*12 x 31 pixels.*would do is 8 x 32"),
        ({"length": 14}, r"needs 15 positions.*length is 14"),
    ],
)
def test_what_some_example_would_not_fit_is_refused_at_once(changes, message):
    with pytest.raises(ValueError, match=message):
        dataset(**changes)


def test_hidden_text_is_missing_from_the_tokens_alone():
    plain, hiding = dataset("train"), dataset("train", hide_text=0.8)
    shares = []
    for index in range(200):
        whole, holes = plain[index], hiding[index]
        hidden = whole["tokens"] != holes["tokens"]
        assert np.all(holes["tokens"][hidden] == tokens.PAD)
        assert np.all(whole["tokens"][hidden] >= tokens.FIRST_CHARACTER)
        for name in ("image", "targets", "weights", "caption"):
            assert np.array_equal(whole[name], holes[name])
        shares.append(hidden.sum() / len(whole["caption"]))
        assert same(dataset("train", hide_text=0.8)[index], holes) or index > 9
    assert 0.3 < np.mean(shares) < 0.5 and min(shares) == 0 and max(shares) > 0.7


def test_rows_alone_equal_rows_of_the_whole_batch():
    whole = Batches(dataset(), 6).rows(3, range(6))
    assert set(whole) == {"image", "tokens", "targets", "weights"}
    assert whole["image"].shape == (6, 12, 40, 1) and whole["tokens"].shape == (6, 16)
    assert whole["image"].dtype == np.uint8 and whole["weights"].dtype == np.float32
    for rows in ([0], [5], [4, 1], np.array([2, 3])):
        part = Batches(dataset(), 6).rows(3, rows)
        assert same(part, {name: array[list(rows)] for name, array in whole.items()})


def test_row_r_of_step_s_is_example_s_times_batch_size_plus_r():
    examples, batches = dataset(), Batches(dataset(), 4)
    for step in range(3):
        rows = batches.rows(step, range(4))
        for row in range(4):
            assert np.array_equal(rows["image"][row], examples[step * 4 + row]["image"])


def test_captions_are_those_of_the_rows():
    batches = Batches(dataset(), 5)
    read = [tokens.decode(row) for row in batches.rows(2, range(5))["tokens"]]
    assert batches.captions(2) == read
    assert batches.captions(1) != read


@pytest.mark.parametrize(
    ("step", "rows", "message"),
    [
        (0, [4], r"row 4 is outside the batch of 4; valid rows are 0 to 3"),
        (0, [-1], r"row -1 is outside the batch of 4"),
        (0, [], r"rows is empty.*0 to 3"),
        (-1, [0], r"step is -1.*at least 0"),
    ],
)
def test_rows_and_steps_that_do_not_exist_are_refused(step, rows, message):
    with pytest.raises(ValueError, match=message):
        Batches(dataset(), 4).rows(step, rows)


def test_a_batch_size_below_one_is_refused():
    with pytest.raises(ValueError, match=r"batch_size is 0.*at least 1"):
        Batches(dataset(), 0)


def test_prefetch_gives_the_values_in_order_from_another_thread():
    prefetch = Prefetch(lambda step: (step, threading.get_ident()), 5, 3)
    values = [prefetch.get(step) for step in range(5, 25)]
    prefetch.close()
    assert [step for step, _ in values] == list(range(5, 25))
    assert {thread for _, thread in values}.isdisjoint({threading.get_ident()})


def test_prefetch_runs_depth_steps_ahead_and_no_further():
    started, reached = [], {step: threading.Event() for step in range(5)}

    def function(step):
        started.append(step)
        reached[step].set()

    prefetch = Prefetch(function, 0, 3)
    assert reached[2].wait(WAIT)
    assert not reached[3].wait(0.1)
    prefetch.get(0)
    assert reached[3].wait(WAIT)
    assert not reached[4].wait(0.1)
    prefetch.close()
    assert started == [0, 1, 2, 3]


def test_prefetch_raises_at_the_step_that_failed_and_goes_on_raising():
    def function(step):
        if step == 2:
            raise KeyError("no such picture")
        return step

    prefetch = Prefetch(function, 0, 4)
    assert [prefetch.get(0), prefetch.get(1)] == [0, 1]
    for _ in range(2):
        with pytest.raises(KeyError, match="no such picture"):
            prefetch.get(2)
    prefetch.close()


def test_prefetch_refuses_a_step_out_of_order():
    prefetch = Prefetch(lambda step: step, 3, 1)
    for wrong in (4, 2):
        with pytest.raises(ValueError, match=rf"step {wrong} was asked for.*next step is 3"):
            prefetch.get(wrong)
    assert prefetch.get(3) == 3
    prefetch.close()


def test_prefetch_refuses_a_depth_below_one():
    with pytest.raises(ValueError, match=r"depth is 0.*at least 1"):
        Prefetch(lambda step: step, 0, 0)


def test_close_ends_the_thread_even_when_it_waits_for_room():
    before, filled = set(threading.enumerate()), threading.Event()
    prefetch = Prefetch(lambda step: filled.set(), 0, 1)
    assert filled.wait(WAIT)
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon
    prefetch.close()
    prefetch.close()
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match=r"step 0 was asked for.*closed"):
        prefetch.get(0)


def test_close_frees_a_get_that_waits():
    begun, go_on, raised = threading.Event(), threading.Event(), []

    def function(step):
        begun.set()
        go_on.wait(WAIT)

    def wait_for_it():
        with pytest.raises(RuntimeError, match="is closed") as error:
            prefetch.get(0)
        raised.append(error)

    prefetch = Prefetch(function, 0, 1)
    assert begun.wait(WAIT)
    getter = threading.Thread(target=wait_for_it, daemon=True)
    closer = threading.Thread(target=prefetch.close, daemon=True)
    getter.start()
    closer.start()
    getter.join(WAIT)
    assert raised and closer.is_alive()
    go_on.set()
    closer.join(WAIT)
    assert not closer.is_alive()
