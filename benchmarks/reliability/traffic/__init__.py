"""What the cases send: pictures, valid calls, a mix of all calls, and a client to be killed."""
