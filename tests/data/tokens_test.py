from __future__ import annotations

import numpy as np
import pytest

from optimus_jax.data import tokens


def test_vocabulary_is_fixed():
    assert (tokens.PAD, tokens.BOS, tokens.EOS, tokens.IMAGE) == (0, 1, 2, 3)
    assert tokens.encode("0123456789 ") == list(range(4, 15))
    assert tokens.encode("azAZ.+") == [15, 40, 41, 66, 67, 82]
    assert tokens.SIZE == 83
    assert len(set(tokens.CHARACTERS)) == len(tokens.CHARACTERS)


@pytest.mark.parametrize("text", ["", "3 1 4", tokens.CHARACTERS, " 9", "A red fox!"])
def test_decode_reads_back_what_encode_wrote(text):
    assert tokens.decode(tokens.encode(text)) == text


def test_decode_stops_at_eos_and_skips_what_is_not_text():
    five, six = tokens.encode("56")
    ids = [tokens.IMAGE, tokens.BOS, five, tokens.PAD, six, tokens.EOS, five, 99]
    assert tokens.decode(ids) == "56"
    assert tokens.decode(np.array(ids, np.int32)) == "56"


def test_encode_names_the_unknown_character_and_the_valid_ones():
    with pytest.raises(ValueError, match=r"'ä' at position 2 of '1 ä'.*0123456789 abc"):
        tokens.encode("1 ä")


@pytest.mark.parametrize("unknown", [-1, 83])
def test_decode_names_the_unknown_id_and_the_valid_ones(unknown):
    with pytest.raises(ValueError, match=rf"id {unknown} is not.*0 to 82"):
        tokens.decode([4, unknown])


def test_sequence_layout_written_out():
    example = tokens.sequence("3 1", image_tokens=2, length=9)
    assert example["tokens"].tolist() == [3, 3, 1, 7, 14, 5, 2, 0, 0]
    assert example["targets"].tolist() == [3, 1, 7, 14, 5, 2, 0, 0, 0]
    assert example["weights"].tolist() == [0, 0, 1, 1, 1, 1, 0, 0, 0]
    assert {name: array.dtype for name, array in example.items()} == {
        "tokens": np.int32,
        "targets": np.int32,
        "weights": np.float32,
    }


@pytest.mark.parametrize("caption", ["", "7", "1 2 3 4"])
@pytest.mark.parametrize("image_tokens", [0, 5])
@pytest.mark.parametrize("spare", [0, 3])
def test_weighted_targets_are_the_next_tokens_and_spell_the_caption(caption, image_tokens, spare):
    length = image_tokens + len(caption) + 2 + spare
    example = tokens.sequence(caption, image_tokens, length)
    assert all(array.shape == (length,) for array in example.values())
    weighted = np.flatnonzero(example["weights"])
    assert len(weighted) == len(caption) + 1
    assert np.all(example["weights"][weighted] == 1)
    assert np.array_equal(example["targets"][weighted], example["tokens"][weighted + 1])
    assert example["targets"][weighted].tolist() == [*tokens.encode(caption), tokens.EOS]
    assert np.count_nonzero(example["tokens"] == tokens.PAD) == spare


def test_a_caption_that_does_not_fit_is_refused_with_both_numbers():
    assert tokens.sequence("1 2", image_tokens=4, length=9)["tokens"][-1] == tokens.EOS
    with pytest.raises(ValueError, match=r"'1 2' needs 9 positions.*length is 8.*at least 9"):
        tokens.sequence("1 2", image_tokens=4, length=8)


def test_prompt_is_the_sequence_up_to_bos():
    prompt = tokens.prompt(image_tokens=3, length=8)
    assert prompt.dtype == np.int32
    assert prompt.tolist() == [3, 3, 3, 1, 0, 0, 0, 0]
    assert np.array_equal(prompt[:4], tokens.sequence("12", 3, 8)["tokens"][:4])


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers():
    assert tokens.prompt(3, 4).tolist() == [3, 3, 3, 1]
    with pytest.raises(ValueError, match=r"need 4 positions but length is 3.*at least 4"):
        tokens.prompt(3, 3)
    with pytest.raises(ValueError, match=r"image_tokens is -1.*at least 0"):
        tokens.prompt(-1, 3)
