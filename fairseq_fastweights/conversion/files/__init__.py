"""Files and folders, as conversions read and write them."""
