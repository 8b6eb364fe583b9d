"""`HermesAgentBaseEnv` and its parts."""
