"""What a task asks for, read from the files of its folder and checked."""
