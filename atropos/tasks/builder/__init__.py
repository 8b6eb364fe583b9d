"""How the image of a task's workspace is built in slots, step by step."""
