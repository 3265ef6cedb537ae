//! Which sockets a QEMU's command line names.

use std::path::PathBuf;

use serde_json::Value;

/// The port of the guest agent, in QEMU and in its guests.
const AGENT_PORT: &str = "org.qemu.guest_agent.0";

/// Where a chardev of QEMU's listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Chardev {
    /// A socket that can be connected to.
    Path(PathBuf),
    /// A descriptor that QEMU was given when it was started, as by libvirt: there is no way to it.
    Inherited,
}

impl Chardev {
    /// The chardev of that name, from QEMU's command line.
    fn find(command: &[String], id: &str) -> Option<Chardev> {
        let mut sockets = values(command, "-chardev").filter(|value| value.starts_with("socket,"));
        let socket = sockets.find(|value| part(value, "id").as_deref() == Some(id))?;
        match part(socket, "path") {
            Some(path) => Some(Chardev::Path(path.into())),
            None => part(socket, "fd").map(|_| Chardev::Inherited),
        }
    }

    /// Its monitor: of `-qmp unix:PATH,...`, or `-chardev socket,id=ID,path=PATH` with `-mon chardev=ID,mode=control`.
    pub fn monitor(command: &[String]) -> Option<Chardev> {
        if let Some(path) = values(command, "-qmp").find_map(|value| value.strip_prefix("unix:")) {
            // The first word without a key is the path.
            return part(&format!("path={path}"), "path").map(|path| Chardev::Path(path.into()));
        }
        let control =
            values(command, "-mon").find(|value| part(value, "mode").as_deref() == Some("control"))?;
        let id = part(control, "chardev").or_else(|| control.split(',').next().map(String::from))?;
        Chardev::find(command, &id)
    }

    /// Its guest agent: a port of that name, its chardev.
    pub fn agent(command: &[String]) -> Option<Chardev> {
        let port =
            values(command, "-device").find(|device| part(device, "name").as_deref() == Some(AGENT_PORT))?;
        Chardev::find(command, &part(port, "chardev")?)
    }
}

/// What stands after an option of QEMU's, each time; it takes two dashes as well.
fn values<'a>(command: &'a [String], option: &'a str) -> impl Iterator<Item = &'a str> {
    let pairs = command.windows(2).filter(move |pair| {
        pair[0] == option || pair[0].strip_prefix('-').is_some_and(|shorter| shorter == option)
    });
    pairs.map(|pair| pair[1].as_str())
}

/// The value of a key in `first,key=value,...`, where two commas are one that is meant, or in JSON.
fn part(value: &str, key: &str) -> Option<String> {
    let found = if value.starts_with('{') {
        serde_json::from_str::<Value>(value).ok()?[key].as_str()?.to_owned()
    } else {
        // No word of a command line has a zero in it.
        let value = value.replace(",,", "\0");
        value.split(',').find_map(|part| part.strip_prefix(key)?.strip_prefix('='))?.replace('\0', ",")
    };
    (!found.is_empty()).then_some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(String::from).collect()
    }

    #[test]
    fn chardevs_of_people_and_of_libvirt() {
        let found = |line: &str| Chardev::find(&words(line), "mon0");
        let path = |path: &str| Some(Chardev::Path(path.into()));
        assert_eq!(found("qemu -chardev socket,id=mon0,path=/run/b,server=on"), path("/run/b"));
        assert_eq!(found("qemu --chardev socket,path=/run/a,,b,id=mon0"), path("/run/a,b"));
        assert_eq!(found("qemu -chardev socket,id=mon0,fd=24,server=on,wait=off"), Some(Chardev::Inherited));
        assert_eq!(found("qemu -chardev socket,id=mon0,host=a,port=4"), None);
        assert_eq!(found("qemu -chardev socket,id=mon01,path=/a -chardev"), None);
        assert_eq!(part(r#"{"driver":"virtserialport","name":"a"}"#, "name").as_deref(), Some("a"));
        assert_eq!(part("{", "name"), None);
    }

    #[test]
    fn the_monitor_is_found() {
        let found = |line: &str| Chardev::monitor(&words(line));
        let path = |path: &str| Some(Chardev::Path(path.into()));
        assert_eq!(found("qemu -qmp unix:/run/a,server=on -m 1"), path("/run/a"));
        assert_eq!(found("qemu -qmp unix:/run/a,,b,server=on -m 1"), path("/run/a,b"));
        let libvirt =
            "qemu -chardev socket,id=mon0,path=/run/b,server=on -mon chardev=mon0,id=monitor,mode=control";
        assert_eq!(found(libvirt), path("/run/b"));
        let handed = libvirt.replace("path=/run/b", "fd=24");
        assert_eq!(found(&handed), Some(Chardev::Inherited));
        assert_eq!(found("qemu -mon chardev=x,mode=readline"), None);
        assert_eq!(found("qemu -qmp"), None);
    }

    #[test]
    fn the_agent_is_found() {
        let line = "qemu -chardev socket,id=qga,path=/run/a,server=on \
                    -device virtserialport,chardev=qga,name=org.qemu.guest_agent.0";
        assert_eq!(Chardev::agent(&words(line)), Some(Chardev::Path("/run/a".into())));
        let libvirt = "qemu -chardev socket,id=qga,fd=31,server=on \
                       -device {\"driver\":\"virtserialport\",\"chardev\":\"qga\",\"name\":\"org.qemu.guest_agent.0\"}";
        assert_eq!(Chardev::agent(&words(libvirt)), Some(Chardev::Inherited));
        assert_eq!(Chardev::agent(&words("qemu -m 1")), None);
    }
}
