"""
Planned packs inside ms-swift's own training commands.

The file that `--external_plugins` names calls `install` (`plugin`). `command` resolves a command
and refuses arguments that contradict a plan, `packs` has the data set of packs, and `training` the
trainer that follows their schedule.
"""

from packplan.adapters.swift.plugin import install
