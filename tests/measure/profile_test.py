"""Measured costs: what they add up to, on a machine whose speed is known."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import jax
import pytest

from configs.bench import get_config
from optimus_jax.config import Config, from_config_dict
from optimus_jax.cost.costs import Costs, Pass
from optimus_jax.measure import profile
from optimus_jax.measure.probes import probes
from optimus_jax.measure.profile import Profile
from optimus_jax.measure.rounds import Spread
from optimus_jax.schedule.program import LLM, Payload
from optimus_jax.schedule.task import EncoderPipeline, Pipeline, Task

MILLISECONDS = {
    "F layers": 31.0,
    "F none": 1.0,
    "F first": 1.5,
    "F last": 6.0,
    "B layers": 92.0,
    "B none": 2.0,
    "B first": 3.0,
    "EF whole": 44.0,
    "EF patches": 3.0,
    "EF projector": 5.0,
    "EB whole": 130.0,
    "EB patches": 4.0,
    "EB projector": 6.0,
    "exchange": 0.25,
    "feature exchange": 0.5,
    "epilogue": 8.0,
}


def measurements(**changes: float) -> dict[str, Spread]:
    figures = {**MILLISECONDS, **changes}
    return {name: Spread(1e-3 * value, 1e-4, 15) for name, value in figures.items()}


def config_of(
    pp: int = 3, chunks: int = 1, llm_layers: int = 9, ears: int = 0, fuse: bool = False
) -> Config:
    """With `ears` stages of a second encoder; with `fuse`, two tensor shards."""
    values = get_config("tp2_m4" if fuse else "pp2_m4").to_dict()
    values["parallel"]["fuse"] = fuse
    if ears:
        own = {"layers": 6, "width": 32, "heads": 2, "hidden": 48, "patch": 4, "input": "audio"}
        values["model"] |= {"more_encoders": {"ears": own}, "audio_frames": 16, "audio_bands": 5}
        values["parallel"]["more_encoders"] = {"ears": {"pp": ears}}
    values["parallel"] |= {"pp": pp, "chunks": chunks, "microbatches": 6}
    values["model"]["llm"]["layers"] = llm_layers
    values["model"]["encoder"]["layers"] = 4
    values["train"]["batch"] = 36
    return from_config_dict(values)


def numbers(costs: Costs) -> list[float]:
    """All seconds, those that there are none of as -1."""
    leaves = jax.tree.leaves(dataclasses.asdict(costs), is_leaf=lambda x: x is None)
    return [-1.0 if x is None else float(x) for x in leaves if not isinstance(x, str)]


def seconds(config: Config, costs: Costs, task: str, device: int) -> float:
    """Milliseconds, of one unit where it is the encoder's."""
    return 1e3 * costs.durations(config).of(Task.parse(task), device, config.pipeline)


def test_stages_and_units_take_what_was_measured() -> None:
    config = config_of()
    costs = profile._costs(config, config.pipeline, measurements())
    assert costs.source == "measured"
    found = {
        (task, device): seconds(config, costs, task, device)
        for task in ("F0", "B0")
        for device in range(3)
    }
    assert found == pytest.approx(
        {
            ("F0", 0): 31.0 + 0.5,  # with the embedding
            ("F0", 1): 31.0,
            ("F0", 2): 31.0 + 5.0,  # with the head
            ("B0", 0): 92.0 + 1.0,
            ("B0", 1): 92.0,
            ("B0", 2): 92.0,
        }
    )
    assert seconds(config, costs, "EF1.2", 0) == pytest.approx(44.0)
    assert seconds(config, costs, "EB1.2", 2) == pytest.approx(130.0)
    assert seconds(config, costs, "EF1", 0) == pytest.approx(3 * 44.0)
    durations = costs.durations(config)
    assert (durations.travel(LLM), durations.travel(Payload("feature"))) == (0.25e-3, 0.5e-3)
    assert durations.epilogue == 8e-3


def test_a_stage_with_fewer_layers_takes_less_for_its_layers_only() -> None:
    config = config_of(pp=2, chunks=2, llm_layers=9)
    assert config.pipeline.llm_layers == (3, 2, 2, 2)
    costs = profile._costs(config, config.pipeline, measurements())
    assert seconds(config, costs, "F0", 1) == pytest.approx(1 + 2 * 10)
    assert seconds(config, costs, "B0c1", 1) == pytest.approx(2 + 2 * 30)


def test_what_was_measured_below_zero_counts_as_nothing() -> None:
    config = config_of()
    low = {"F none": -1.0, "F first": -2.0, "B first": 0.5, "exchange": -0.1, "epilogue": -1.0}
    low |= {"EF whole": 4.0, "EB patches": -4.0}
    costs = profile._costs(config, config.pipeline, measurements(**low))
    assert costs.llm_task == Pass(0.0, 2e-3)
    assert costs.llm_embedding == Pass(0.0, 0.0)
    assert seconds(config, costs, "F0", 1) == pytest.approx(31.0)
    assert (costs.exchange, costs.epilogue) == (0.0, 0.0)
    vision = costs.encoders["vision"]
    assert vision.layer.forward == 0.0, "the ends alone took longer than the whole"
    assert vision.input_embedding.backward == 0.0
    assert min(x for x in numbers(costs) if x != -1.0) >= 0, "-1 is none"


def test_one_device_needs_no_exchange() -> None:
    config = config_of(pp=1)
    found = measurements()
    del found["exchange"], found["feature exchange"]
    durations = profile._costs(config, config.pipeline, found).durations(config)
    assert durations.travel(LLM) == durations.travel(Payload("feature")) == 0


def test_units_of_another_pipeline_are_told_as_the_configurations_own() -> None:
    """Its unit is a whole microbatch, theirs a third."""
    config = config_of()
    pipe = Pipeline(3, 6, 1, (3, 3, 3), (EncoderPipeline((4, 0, 0), 1),))
    costs = profile._costs(config, pipe, measurements())
    whole = costs.durations(config, pipe).encoders[0]
    assert sum(whole.forward) == pytest.approx(44e-3)
    assert sum(costs.durations(config).encoders[0].backward) == pytest.approx(130e-3 / 3)


def test_all_time_of_a_sleeping_task_is_that_of_its_layers() -> None:
    """Its row says nothing: all of device 0's tasks sleep as long as its stage has layers."""
    config = config_of(pp=2, chunks=2, llm_layers=9)
    assert config.pipeline.llm_layers == (3, 2, 2, 2)
    same = measurements(**{"F layers": 10.0, "F none": 10.0, "B layers": 20.0, "B none": 20.0})
    costs = profile._costs(config, config.pipeline, same, emulated=True)
    assert costs.llm_task == Pass(0.0, 0.0)
    assert costs.llm_layer.forward == pytest.approx(10e-3 / 2.5)
    assert costs.llm_layer.backward == pytest.approx(20e-3 / 2.5)


@pytest.mark.parametrize(
    ("fused", "window"),
    # 4 layers of 10 and 4 of 9 take 77 apart; of the backward 122 and 4 of 30
    [({"F fused": 69.0, "B fused": 232.0}, (2.0, 2.5)), ({"F fused": 80.0}, (0.0, 0.0))],
)
def test_what_fused_layers_save_is_the_window(
    fused: dict[str, float], window: tuple[float, float]
) -> None:
    config = config_of(pp=1, llm_layers=4, fuse=True)
    assert config.pipeline.llm_layers == (4,)
    found = {"F layers": 41.0, "B layers": 122.0, "B fused": 300.0, **fused}
    costs = profile._costs(config, config.pipeline, measurements(**found))
    saved = costs.window.forward, costs.window.backward
    assert saved == pytest.approx([1e-3 * x for x in window])


WHERE: dict[str, Any] = {"devices": 3, "processor": "A Chip", "device": "cpu", "jax": "1.2.3"}


def test_a_saved_profile_is_read_as_costs(tmp_path: pathlib.Path) -> None:
    config = config_of()
    once = Spread(0.3, 0.01, 15)
    taken = Profile(
        profile._costs(config, config.pipeline, measurements()), measurements(), WHERE, once
    )
    taken.save(tmp_path / "profile.json")
    assert Costs.load(tmp_path / "profile.json") == taken.costs
    found = json.loads((tmp_path / "profile.json").read_text())
    assert found == json.loads(json.dumps(taken.as_json()))
    assert found["measurements"]["F last"] == {"median": 6e-3, "iqr": 1e-4, "count": 15}
    assert found["where"] == WHERE


def test_text_names_every_measurement_with_its_figures() -> None:
    config = config_of()
    names = {p.name for p in probes(config.pipeline, 1)} | {"epilogue"}
    found = measurements()
    assert found.keys() == names
    costs = profile._costs(config, config.pipeline, found)
    text = profile.text(Profile(costs, found, WHERE, Spread(0.3, 0.01, 15)), config)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for name, milliseconds in MILLISECONDS.items():
        words = profile.WORDS[name].format(layers=3, encoder=4).strip()
        assert f"{words} {milliseconds:.2f} 0.10 15" in lines, name
    assert lines[0] == "3 x A Chip (cpu), jax 1.2.3"
    assert "LLM forward, 3 layers 31.00 0.10 15" in lines
    assert "encoder forward of a unit, 4 layers 44.00 0.10 15" in lines
