"""The domain: episodes, policies, settings, results and checks; knows no database."""
