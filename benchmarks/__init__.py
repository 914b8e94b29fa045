"""Programs that measure, print ratios to a reference measured in the same run, and are no tests."""
