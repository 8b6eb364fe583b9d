"""Who uses an executor server: keys, what each of them may use and has used, and the audit log."""
