"""SSD-SGD: a sharded parameter server that is pulled every few steps, with local updates in between."""
