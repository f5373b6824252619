"""The command's subcommands, a module for each kind; see `tuner.cli`."""
