"""Sandbox slots for agentic reinforcement learning."""
