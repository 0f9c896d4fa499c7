"""The size of a compiled program, and what of it lists devices."""

from __future__ import annotations

from optimus_jax.gpu.size import ProgramSize, program_size

LISTS = (
    "replica_groups={{0,1},{2,3}}",
    "source_target_pairs={{0,2},{2,0}}",
)
HLO = f"""\
HloModule step, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  ROOT %sum = f32[] add(%a, %b)
}}

ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  %all-reduce.1 = f32[8]{{0}} all-reduce(%x), {LISTS[0]}, to_apply=%add
  %moved = f32[8]{{0}} collective-permute(%all-reduce.1), {LISTS[1]}
  ROOT %r = f32[8]{{0}} all-reduce(%moved), replica_groups=[2,2]<=[4], to_apply=%add
}}
"""


def test_lists_of_devices_are_counted_and_iota_groups_are_not() -> None:
    size = program_size(HLO)
    assert size == ProgramSize(len(HLO), 6, sum(map(len, LISTS)))
    share = f"{size.listing_devices / size.characters:.0%}"
    assert str(size) == (
        f"HLO of 6 instructions, {len(HLO):,} characters, {share} of which list devices"
    )
