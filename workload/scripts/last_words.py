"""The words of a program's log that explain its end.

A shell, and each program that starts another one, ends with 127 if there is no such program and
with 126 if it cannot be executed, and says which in a line of its own (POSIX, Shell Command
Language, 2.8.2). That line need not be the last: `time` reports after it.
"""

from __future__ import annotations

import re

#: Longest line that is quoted.
_LONGEST = 200
#: Lines by which shells and starters say that there is no such program: bash, dash, busybox, sudo,
#: env, xargs, nohup, time, taskset, timeout and nice; zsh; container runtimes; fish; Ubuntu's bash.
_NOT_FOUND = re.compile(
    r": (?:command )?not found\.*$"
    r"|: No such file or directory$"
    r"|: (?:command not found|no such file or directory): \S"
    r"|executable file not found in \$PATH"
    r"|: required file not found$"
    r"|\bUnknown command: \S"
    r"|^Command '.+' not found",
    re.I,
)
#: The same of a program that is there.
_NOT_EXECUTED = re.compile(
    r": (?:permission denied|is a directory|exec format error|text file busy"
    r"|argument list too long)(?:: \S.*)?$"
    r"|: cannot execute\b"
    r"|: bad interpreter: ",
    re.I,
)
#: What the loader says of a program whose library is missing, also with 127.
_NOT_LOADED = re.compile(r": error while loading shared libraries: ")
_OF_CODES = {
    127: ((_NOT_LOADED, "could not be loaded"), (_NOT_FOUND, "was not found")),
    126: ((_NOT_EXECUTED, "could not be executed"),),
}
#: What `time` reports: bash's and POSIX's, GNU's in short and with -v, and zsh's.
_OF_TIME = re.compile(
    r"(?:real|user|sys)\s+(?:\d+m)?[\d.,]+s?$"
    r"|[\d.,]+user [\d.,]+system [\d:.,]+elapsed |\d+inputs\+\d+outputs "
    r"|Command (?:exited with non-zero status|terminated by signal) \d+$"
    r"|Command being timed: |(?:User|System) time \(seconds\): |Percent of CPU this job got: "
    r"|Elapsed \(wall clock\) time |Average (?:shared text|unshared data|stack|total|resident set) "
    r"|(?:Average resident|Maximum resident) set size |(?:Major|Minor) \(.*\) page faults: "
    r"|(?:Voluntary|Involuntary) context switches: |Swaps: |File system (?:inputs|outputs): "
    r"|Socket messages (?:sent|received): |Signals delivered: |Page size \(bytes\): |Exit status: "
    r"|.*\s[\d.,]+s user [\d.,]+s system \d+% cpu [\d:.,]+ total$"
)
#: What launchers write of a rank that ended: torchrun, accelerate, deepspeed, srun and make.
_OF_LAUNCHER = re.compile(
    r"^(?:.*torch[./]distributed[./](?:elastic|run|launcher)|.*CalledProcessError|"
    r"\[.*launch\.py:\d+:|srun: error: |make(?:\[\d+\])?: \*\*\* )",
    re.M,
)


def explained_exit(code: int, log: str) -> str:
    """Return the end of a command by an exit code of shells, a clause; empty for another code."""
    if code not in _OF_CODES:
        return ""
    lines = [line.strip() for line in log.splitlines()]
    for line in reversed(lines):
        for says_so, outcome in _OF_CODES[code]:
            if says_so.search(line) and "[Errno " not in line:
                return f'a program of the command {outcome} (exit code {code}): "{quoted(line)}"'
    how = "was not found" if code == 127 else "could not be executed"
    return f"the command ended with exit code {code}, which shells use if a program {how}"


def last_words(log: str) -> str:
    """Return a program's own last line, without those of launchers and of `time`; "" if none."""
    own, *launchers = _OF_LAUNCHER.split(log, maxsplit=1)
    if launchers:  # a traceback of the launcher has begun above its first words
        own = own.partition("Traceback (most recent call last):")[0]
    lines = [line.strip() for line in own.splitlines()]
    own_lines = (line for line in reversed(lines) if re.search(r"\w", line))
    return next((line for line in own_lines if not _OF_TIME.match(line)), "")


def quoted(line: str) -> str:
    """Return a line as far as it is quoted."""
    return line[:_LONGEST]
