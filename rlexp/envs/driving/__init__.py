"""A world of cars: `env=driving/*`. docs/driving.md says what it models, and after which papers."""
