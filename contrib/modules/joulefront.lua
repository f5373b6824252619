-- Lmod module file. Change the folder to the environment in which joulefront is installed.
local folder = "/opt/joulefront"

help([[joulefront tunes the configuration of a training job for energy and time.
Begin with: tuner doctor]])
whatis("Name: joulefront")
whatis("Description: tunes distributed training for energy and time")

prepend_path("PATH", pathJoin(folder, "bin"))
setenv("RAY_USAGE_STATS_ENABLED", "0")
