"""python -m optimus_jax.profile: times each kind of task on this machine, for plan and train.

Forward and backward of LLM layers and encoder layers, what stands at their ends, exchanges and the
end of a step: each alone, on all devices at once, inside the compiled training step. The file holds
costs, which --costs=FILE gives to plan and train, and the measurements that they come from.
"""

from __future__ import annotations

import pathlib

from absl import flags

from optimus_jax import command
from optimus_jax.errors import UserError
from optimus_jax.measure import start

command.define_config()
start.define_processes()
flags.DEFINE_string("out", "profile.json", "The file to write.")
flags.DEFINE_integer("rounds", 25, "How often each task is timed.", lower_bound=1)


def main() -> int:
    options, config = flags.FLAGS, command.config()
    wrong = start.wrong_processes(config)
    if not pathlib.Path(options.out).parent.is_dir():
        wrong.append(f"--out={options.out}: there is no folder {pathlib.Path(options.out).parent}")
    if wrong:
        raise UserError("\n".join(wrong))
    code = start.start("optimus_jax.profile", config)
    if code is not None:
        return code
    from optimus_jax.measure import profile
    from optimus_jax.measure.session import Session

    taken = profile.take(Session(config, profile.shape(config)), options.rounds)
    if command.is_first():
        taken.save(options.out)
        command.say(profile.text(taken, config))
        command.say(f"\nwritten to {options.out}; plan and train take it as --costs={options.out}")
        if options.json:
            command.emit(taken.as_json())
    return 0


if __name__ == "__main__":
    command.run(main)
