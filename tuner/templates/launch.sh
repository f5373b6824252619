#!/usr/bin/env bash
# Trains @JOB@ under @CONFIGURATION@
@HOW@
@TRY@
# Live settings: @LIVE@
set -euo pipefail
@HERE@
cd -- @FOLDER@

@PROGRAM@

installed_python=@PYTHON@
python="${PYTHON:-$installed_python}"
@ENVIRONMENT@

@START@
