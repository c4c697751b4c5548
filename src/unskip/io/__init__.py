"""Networks from files and names, and files of networks."""
