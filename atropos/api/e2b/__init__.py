"""The E2B API over slots: code written for the `e2b` SDK runs with another URL."""
