"""Images as root file systems of slots: where they come from, and the store that keeps them unpacked."""
