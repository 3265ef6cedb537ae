//! Ports whose value tells more than that they were written to.

/// So many ports; a VM has few legacy devices.
const MOST: usize = 16;

/// Ports at which legacy virtio devices are told that a queue has something new. What is written is the queue's number (Virtio 1.3, 4.1.5.2 and 2.9.2): it is recorded
/// of these ports, and of no other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueuePorts([u16; MOST]);

impl QueuePorts {
    /// The first sixteen of these.
    pub fn new(ports: impl IntoIterator<Item = u16>) -> QueuePorts {
        let mut own = [0; MOST];
        for (own, port) in own.iter_mut().zip(ports.into_iter().filter(|port| *port != 0)) {
            *own = port;
        }
        QueuePorts(own)
    }

    /// Whether that is one of them.
    pub fn has(&self, port: u16) -> bool {
        port != 0 && self.0.contains(&port)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0[0] == 0
    }

    /// All; what there are not are zero.
    pub(crate) fn numbers(&self) -> &[u16; MOST] {
        &self.0
    }

    /// The kernel's filter of `kvm_pio` to these ports (Linux, Documentation/trace/events.rst).
    pub(crate) fn filter(&self) -> String {
        let ports = self.0.iter().filter(|port| **port != 0).map(|port| format!("port == {port}"));
        ports.collect::<Vec<_>>().join(" || ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_few() {
        let none = QueuePorts::new([0]);
        assert!(none.is_empty() && !none.has(0) && none.filter().is_empty());
        let ports = QueuePorts::new((0xc000..0xffff).step_by(16));
        assert!(ports.has(0xc000) && ports.has(0xc0f0) && !ports.has(0xc100) && !ports.has(0));
        assert_eq!(QueuePorts::new([0xc010, 0, 0xc030]).filter(), "port == 49168 || port == 49200");
    }
}
