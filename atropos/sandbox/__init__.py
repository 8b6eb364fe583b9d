"""The inside of a container: slots, their leases, and the server that offers them."""
