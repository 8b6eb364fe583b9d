#!/bin/bash
# Writes /logs/verifier/reward.txt.
exec python3 /tests/check.py
