"""The pool against a model of servers; what needs real ones is in tests/truths and tests/conformance."""
