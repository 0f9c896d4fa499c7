"""What tells one data set's files from others."""

from __future__ import annotations

import pathlib

from optimus_jax.data.digits import Digits
from optimus_jax.data.fashion import Fashion
from optimus_jax.data.stamps import Stamps
from tests.data.small_sets import fashion_folder, stamps_folder


def test_digests_tell_other_files_but_not_other_places(tmp_path: pathlib.Path) -> None:
    for kind, make, counts in (
        (Fashion, fashion_folder, (20, 21)),
        (Stamps, stamps_folder, (40, 60)),
    ):
        few, more = counts
        name = kind.__name__
        one, two = (kind(str(make(tmp_path / f"{name}{k}", few))).digest() for k in range(2))
        other = kind(str(make(tmp_path / f"{name}2", more))).digest()
        assert one == two != other != ""
    assert Digits(0, 2).digest() == ""
