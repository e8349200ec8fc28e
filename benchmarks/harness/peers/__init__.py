"""Who is compared: this project's rules and other implementations, each in the layout that suits it."""
