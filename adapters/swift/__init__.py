"""
Planned packs inside ms-swift's own training commands.

The file that is passed to `--external_plugins` calls `install` of the module `plugin`. `command`
reads the arguments of a command, and refuses those that contradict a plan. `packs` has the data set
of packs. `training` makes a trainer follow the schedule of the packs.
"""

from packplan.adapters.swift.plugin import install
