"""Tasks that are lists of terms, in a world that is compiled: `env=managed`. docs/managers.md says what each list holds."""
