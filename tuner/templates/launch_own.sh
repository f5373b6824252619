#!/usr/bin/env bash
# Trains @JOB@ under @CONFIGURATION@ by your own command
# Live settings: @LIVE@
cd -- @FOLDER@ || exit

@PROGRAM@
@ENVIRONMENT@

@START@
