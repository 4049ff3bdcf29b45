"""The domain: episodes, policies, settings, results and errors; knows no database."""
