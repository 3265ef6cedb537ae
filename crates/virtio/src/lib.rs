//! ioplane-virtio
