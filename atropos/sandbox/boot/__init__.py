"""What happens before a sandbox server listens: its init and its root phase."""
