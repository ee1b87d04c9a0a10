"""The capacity of each GPU, the shares that are granted of it, and the queue of the requests that wait for some."""
