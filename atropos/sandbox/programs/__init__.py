"""Programs that a sandbox server starts as processes of their own."""
