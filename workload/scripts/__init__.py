"""A user's training script: how its command is read, what can be set on it, and its start.

`SOCKET` has the parts that an installation may leave out, and the routes that other distributions
bring by an entry point of the group `joulefront.routes`: a `Route` (`routes`) with
`PROTOCOL = 1`.
"""

from tuner.search_spaces.plugins import Socket

SOCKET = Socket(
    "joulefront.routes",
    "route",
    1,
    ("today", "support", "why_not", "apply"),
    {
        "framework": "tuner.workload.scripts.frameworks",
        "framework keys": "tuner.workload.scripts.frameworks.bound_driver:DriverKeys",
        "deepspeed": "tuner.workload.scripts.deepspeed_config:DeepSpeedConfig",
        "launchers": "tuner.workload.scripts.launchers",
        "job script": "tuner.workload.scripts.job_script",
        "proof": "tuner.workload.scripts.proving",
    },
)
