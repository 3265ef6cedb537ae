//! The modules of a crate and what the paths in them lead to.
//!
//! Names are followed as the compiler does, as far as text goes: through `use`, renames, globs and re-exports to the file that
//! declares them. What a macro declares is taken to be where the path says. Other crates' names lead nowhere.

use std::collections::BTreeMap;

use anyhow::{Context, Result};

use crate::outline::{Module, Use};
use crate::tree::Tree;

/// One module of the crate.
struct Node<'a> {
    module: &'a Module,
    /// Index of the file in which it stands.
    file: usize,
    parent: Option<usize>,
    children: BTreeMap<&'a str, usize>,
}

/// A file of the crate.
#[derive(Debug)]
pub struct File {
    /// Where.
    pub path: String,
    /// The module that it is: its names from the root on.
    names: Vec<String>,
}

impl File {
    /// Whether one is the other's parent, or the parent's parent.
    fn is_kin(&self, other: &File) -> bool {
        self.names.starts_with(&other.names) || other.names.starts_with(&self.names)
    }
}

/// A crate: its library, or one of its programs.
pub struct Crate<'a> {
    /// Its files, the root first.
    pub files: Vec<File>,
    nodes: Vec<Node<'a>>,
}

/// What a path leads to.
#[derive(Clone, Copy)]
enum Target {
    Module(usize),
    /// Something else than a module, in this module.
    Item(usize),
}

/// The first use of one file by another.
#[derive(Debug)]
pub struct Edge {
    /// Line of the first one.
    pub line: usize,
    /// The path that leads there.
    pub path: String,
}

impl<'a> Crate<'a> {
    /// The crate whose root is the file `root`, with all files that it declares outside of its tests.
    pub fn read(tree: &'a Tree, root: &str) -> Result<Self> {
        let mut read = Crate { files: Vec::new(), nodes: Vec::new() };
        let folder = root.rsplit_once('/').map_or("", |(folder, _)| folder);
        read.file(tree, root.to_owned(), folder, Vec::new(), None)?;
        Ok(read)
    }

    /// Adds a file whose own modules lie in `folder`.
    fn file(
        &mut self,
        tree: &'a Tree,
        path: String,
        folder: &str,
        names: Vec<String>,
        parent: Option<usize>,
    ) -> Result<Option<usize>> {
        let Some(source) = tree.rust.iter().find(|source| source.path == path) else { return Ok(None) };
        let outline = source.outline().with_context(|| path.clone())?;
        let (file, first) = (self.files.len(), self.nodes.len());
        self.files.push(File { path, names: names.clone() });
        for module in outline {
            let parent = module.parent.map(|at| first + at).or(parent);
            self.nodes.push(Node { module, file, parent, children: BTreeMap::new() });
        }
        for (at, module) in outline.iter().enumerate() {
            if let Some(around) = module.parent {
                self.nodes[first + around].children.insert(&module.name, first + at);
            }
            // Where files of modules written out here lie: in a folder of that name.
            let (mut names, mut inner, mut up) = (names.clone(), Vec::new(), at);
            while let Some(around) = outline[up].parent {
                inner.insert(0, outline[up].name.clone());
                up = around;
            }
            names.extend(inner.iter().cloned());
            let folder: Vec<&str> = std::iter::once(folder).chain(inner.iter().map(String::as_str)).collect();
            let folder = folder.join("/");
            for name in &module.files {
                let names = [names.as_slice(), std::slice::from_ref(name)].concat();
                let below = format!("{folder}/{name}");
                for path in [format!("{below}.rs"), format!("{below}/mod.rs")] {
                    if let Some(child) = self.file(tree, path, &below, names.clone(), Some(first + at))? {
                        self.nodes[first + at].children.insert(name, child);
                    }
                }
            }
        }
        Ok(Some(first))
    }

    /// Which file uses which, parents and children aside.
    pub fn edges(&self) -> BTreeMap<(usize, usize), Edge> {
        let mut edges = BTreeMap::new();
        for (at, node) in self.nodes.iter().enumerate() {
            let imports = node.module.imports.iter().map(|import| &import.used);
            for used in imports.chain(&node.module.paths) {
                let Some(Target::Item(target)) = self.resolve(at, &used.path, &mut Vec::new()) else {
                    continue;
                };
                let (from, to) = (node.file, self.nodes[target].file);
                if from != to && !self.files[from].is_kin(&self.files[to]) {
                    let Use { path, line } = used;
                    let first = || Edge { line: *line, path: path.join("::") };
                    let edge = edges.entry((from, to)).or_insert_with(first);
                    if *line < edge.line {
                        *edge = first();
                    }
                }
            }
        }
        edges
    }

    /// What `path` leads to in module `from`. `seen`: names that are being looked up, for globs and re-exports can be circular.
    fn resolve(&self, from: usize, path: &[String], seen: &mut Vec<(usize, String)>) -> Option<Target> {
        let (first, mut rest) = path.split_first()?;
        let mut at = match first.as_str() {
            "crate" => 0,
            "self" => from,
            "super" => self.nodes[from].parent?,
            name => {
                return match self.member(from, name, seen)? {
                    Target::Module(at) => self.within(at, rest, seen),
                    item => Some(item),
                };
            }
        };
        while let [up, below @ ..] = rest
            && up == "super"
        {
            (at, rest) = (self.nodes[at].parent?, below);
        }
        self.within(at, rest, seen)
    }

    /// What `path` leads to from outside of module `at`.
    fn within(&self, at: usize, path: &[String], seen: &mut Vec<(usize, String)>) -> Option<Target> {
        let Some((first, rest)) = path.split_first() else { return Some(Target::Module(at)) };
        match self.member(at, first, seen) {
            Some(Target::Module(below)) => self.within(below, rest, seen),
            Some(item) => Some(item),
            None => Some(Target::Item(at)),
        }
    }

    /// What is called `name` in module `at`.
    fn member(&self, at: usize, name: &str, seen: &mut Vec<(usize, String)>) -> Option<Target> {
        if seen.iter().any(|(other, asked)| *other == at && asked == name) {
            return None;
        }
        seen.push((at, name.to_owned()));
        let node = &self.nodes[at];
        if let Some(child) = node.children.get(name) {
            return Some(Target::Module(*child));
        }
        if node.module.items.contains(name) {
            return Some(Target::Item(at));
        }
        if let Some(import) = node.module.imports.iter().find(|import| import.name == name) {
            return self.resolve(at, &import.used.path, seen);
        }
        node.module.globs.iter().find_map(|glob| match self.resolve(at, &glob.path, &mut seen.clone())? {
            Target::Module(from) => self.member(from, name, seen),
            // An enum's variants.
            Target::Item(_) => None,
        })
    }
}
